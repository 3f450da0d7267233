"""Complex numbers and Fourier transforms: token mixing, neural operators, filters, speech in time and frequency."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FNet(nn.Module):
    """Lee-Thorp et al. 2021: the real part of a transform over tokens and features mixes. (N, L, 16)."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.ffs = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for i, ff in enumerate(self.ffs):
            x = self.norms[2 * i](x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
            x = self.norms[2 * i + 1](x + ff(x))
        return x


class GlobalFilter(nn.Module):
    """GFNet (Rao et al. 2021): tokens times a learned filter in frequency. (N, 8, 8, 12)."""

    def __init__(self, width: int = 12, h: int = 8, w: int = 5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.complex_weight = nn.Parameter(torch.randn(h, w, width, 2) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.shape[1:3]
        y = torch.fft.rfft2(self.norm(x), dim=(1, 2), norm="ortho")
        y = y * torch.view_as_complex(self.complex_weight)
        return x + torch.fft.irfft2(y, s=(a, b), dim=(1, 2), norm="ortho")


class SpectralConv1d(nn.Module):
    def __init__(self, inside: int, outside: int, modes: int) -> None:
        super().__init__()
        self.outside, self.modes = outside, modes
        scale = 1 / (inside * outside)
        self.weights1 = nn.Parameter(scale * torch.rand(inside, outside, modes, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        out = torch.zeros(x.size(0), self.outside, x.size(-1) // 2 + 1, device=x.device, dtype=torch.cfloat)
        out[:, :, : self.modes] = torch.einsum("bix,iox->box", spectrum[:, :, : self.modes], self.weights1)
        return torch.fft.irfft(out, n=x.size(-1))


class FNO1d(nn.Module):
    """Li et al. 2021: a Fourier neural operator on a line. (N, L, 1)."""

    def __init__(self, width: int = 8, modes: int = 5) -> None:
        super().__init__()
        self.fc0 = nn.Linear(2, width)
        self.convs = nn.ModuleList(SpectralConv1d(width, width, modes) for _ in range(3))
        self.ws = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(3))
        self.fc1, self.fc2 = nn.Linear(width, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        grid = torch.linspace(0, 1, length).reshape(1, length, 1).repeat(n, 1, 1).to(x.device)
        x = self.fc0(torch.cat((x, grid), dim=-1)).permute(0, 2, 1)
        for i, (conv, w) in enumerate(zip(self.convs, self.ws, strict=True)):
            x = conv(x) + w(x)
            if i < len(self.convs) - 1:
                x = F.gelu(x)
        return self.fc2(F.gelu(self.fc1(x.permute(0, 2, 1))))


class FNO2d(nn.Module):
    """The same on a plane: both corners of low frequencies have weights. (N, 3, 16, 16)."""

    def __init__(self, width: int = 6, m1: int = 4, m2: int = 4) -> None:
        super().__init__()
        self.m1, self.m2, self.width = m1, m2, width
        self.lift, self.skip, self.down = nn.Conv2d(3, width, 1), nn.Conv2d(width, width, 1), nn.Conv2d(width, 1, 1)
        self.w1 = nn.Parameter(torch.rand(width, width, m1, m2, dtype=torch.cfloat) / width)
        self.w2 = nn.Parameter(torch.rand(width, width, m1, m2, dtype=torch.cfloat) / width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros(*x.shape[:2], x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cfloat)
        out[:, :, : self.m1, : self.m2] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, : self.m1, : self.m2], self.w1)
        out[:, :, -self.m1 :, : self.m2] = torch.einsum(
            "bixy,ioxy->boxy", spectrum[:, :, -self.m1 :, : self.m2], self.w2
        )
        back = torch.fft.irfft2(out, s=(x.size(-2), x.size(-1)))
        return self.down(F.gelu(back + self.skip(x)))


class AFNO(nn.Module):
    """Guibas et al. 2022: block-diagonal products on frequencies, parts apart, soft shrinkage. (N, 8, 8, 8)."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.blocks, self.size = blocks, width // blocks
        self.w = nn.Parameter(0.3 * torch.randn(2, blocks, self.size, self.size))
        self.b = nn.Parameter(0.1 * torch.randn(2, blocks, self.size))

    def forward(self, x: Tensor) -> Tensor:
        bias, dtype = x, x.dtype
        x = x.float()
        b, h, w, c = x.shape
        x = torch.fft.rfft2(x, dim=(1, 2), norm="ortho").reshape(b, h, w // 2 + 1, self.blocks, self.size)
        multiply = lambda a, k: torch.einsum("...bi,bio->...bo", a, self.w[k])  # noqa: E731
        real = F.relu(multiply(x.real, 0) - multiply(x.imag, 1) + self.b[0])
        imag = F.relu(multiply(x.imag, 0) + multiply(x.real, 1) + self.b[1])
        x = F.softshrink(torch.stack([real, imag], dim=-1), lambd=0.01)
        x = torch.view_as_complex(x).reshape(b, h, w // 2 + 1, c)
        x = torch.fft.irfft2(x, s=(h, w), dim=(1, 2), norm="ortho").type(dtype)
        return x + bias


class FourierUnit(nn.Module):
    """Fast Fourier convolution (Chi et al. 2020), as in LaMa: parts stacked as channels. (N, 4, 12, 12)."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels * 2, channels * 2, 1, bias=False)
        self.bn, self.local = nn.BatchNorm2d(channels * 2), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        f = torch.fft.rfftn(x, dim=(-2, -1), norm="ortho")
        f = torch.stack((f.real, f.imag), dim=-1).permute(0, 1, 4, 2, 3).contiguous()
        f = F.relu(self.bn(self.conv(f.view((batch, -1, *f.size()[3:])))))
        f = f.view((batch, -1, 2, *f.size()[2:])).permute(0, 1, 3, 4, 2).contiguous()
        f = torch.complex(f[..., 0], f[..., 1])
        return self.local(x) + torch.fft.irfftn(f, s=x.shape[-2:], dim=(-2, -1), norm="ortho")


class Autocorrelation(nn.Module):
    """Autoformer (Wu et al. 2021): delays by a transform of the cross power, rolled values added by weight. (N, L, 8)."""

    def __init__(self, width: int = 8, factor: int = 1) -> None:
        super().__init__()
        self.factor = factor
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).transpose(1, 2) for f in (self.q, self.k, self.v))
        length = v.shape[-1]
        power = torch.fft.rfft(q.contiguous(), dim=-1) * torch.conj(torch.fft.rfft(k.contiguous(), dim=-1))
        corr = torch.fft.irfft(power, n=length, dim=-1)
        top = int(self.factor * math.log(length))
        weights, delay = torch.topk(corr.mean(dim=1), top, dim=-1)
        weights = torch.softmax(weights, dim=-1)
        index = torch.arange(length).unsqueeze(0).unsqueeze(0).repeat(*v.shape[:2], 1)
        twice = v.repeat(1, 1, 2)
        out = torch.zeros_like(v)
        for i in range(top):
            at = index + delay[:, i].unsqueeze(1).unsqueeze(1).repeat(1, v.shape[1], length)
            out = out + torch.gather(twice, dim=-1, index=at) * weights[:, i].unsqueeze(1).unsqueeze(1)
        return out.transpose(1, 2)


class S4D(nn.Module):
    """Gu et al. 2022: a diagonal state space's kernel from complex powers, convolved by transforms. (N, 4, L)."""

    def __init__(self, channels: int = 4, state: int = 8) -> None:
        super().__init__()
        self.D = nn.Parameter(torch.randn(channels))
        self.C = nn.Parameter(torch.view_as_real(torch.randn(channels, state // 2, dtype=torch.cfloat)))
        self.log_dt = nn.Parameter(torch.rand(channels) * 2 - 4)
        self.log_a_real = nn.Parameter(torch.log(0.5 * torch.ones(channels, state // 2)))
        self.a_imag = nn.Parameter(math.pi * torch.arange(state // 2).repeat(channels, 1).float())
        self.out = nn.Conv1d(channels, 2 * channels, 1)

    def kernel(self, length: int) -> Tensor:
        dt, c = torch.exp(self.log_dt), torch.view_as_complex(self.C)
        a = -torch.exp(self.log_a_real) + 1j * self.a_imag
        dta = a * dt.unsqueeze(-1)
        k = dta.unsqueeze(-1) * torch.arange(length, device=a.device)
        c = c * (torch.exp(dta) - 1.0) / a
        return 2 * torch.einsum("hn,hnl->hl", c, torch.exp(k)).real

    def forward(self, u: Tensor) -> Tensor:
        length = u.size(-1)
        k = self.kernel(length)
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(k, n=2 * length), n=2 * length)
        y = F.gelu(y[..., :length] + u * self.D.unsqueeze(-1))
        return F.glu(self.out(y), dim=-2)


class Hyena(nn.Module):
    """Poli et al. 2023: long convolutions of gated projections, filters by a small network of positions. (N, L, 6)."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.short = nn.Conv1d(3 * width, 3 * width, 3, padding=2, groups=3 * width)
        self.filter = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, width))
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        a, b, v = self.short(self.project(x).transpose(1, 2))[..., :length].chunk(3, dim=1)
        t = torch.linspace(0, 1, length)[None, :, None]
        z = torch.exp(1j * 2 * math.pi * t)
        k = (self.filter(torch.cat([t, z.real, z.imag], dim=-1)) * torch.exp(-3 * t)).transpose(1, 2)
        u = v * b
        spectrum = torch.fft.rfft(k, n=2 * length) / (2 * length)
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * spectrum, n=2 * length, norm="forward")[..., :length]
        y = (y + u * self.bias[:, None]) * a
        return self.out(y.transpose(1, 2))


class ComplexRotary(nn.Module):
    """Llama's attention as first published: rotations as complex products. (N, L, 16)."""

    def __init__(self, width: int = 16, heads: int = 2, most: int = 32) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        freqs = 1.0 / (10000.0 ** (torch.arange(0, self.size, 2).float() / self.size))
        freqs = torch.outer(torch.arange(most), freqs)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(freqs), freqs), persistent=False)

    def rotate(self, x: Tensor, freqs: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs[None, :, None]).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (t.view(n, length, self.heads, self.size) for t in self.qkv(x).chunk(3, -1))
        freqs = self.freqs_cis[:length]
        q, k = self.rotate(q, freqs), self.rotate(k, freqs)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(n, length, -1))


class Spectrogram(nn.Module):
    """A classifier of sound on log mel bands: stft, power, filter bank, decibels. (N, 512)."""

    def __init__(self, fft: int = 64, bands: int = 12) -> None:
        super().__init__()
        self.fft = fft
        self.register_buffer("window", torch.hann_window(fft))
        self.register_buffer("bank", torch.rand(fft // 2 + 1, bands))
        self.net = nn.Sequential(nn.Conv1d(bands, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(1))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x, self.fft, self.fft // 4, window=self.window, center=True, return_complex=True)
        mel = torch.matmul(spectrum.abs().pow(2).transpose(1, 2), self.bank).transpose(1, 2)
        level = 10.0 * torch.log10(torch.clamp(mel, min=1e-10))
        level = torch.maximum(level, level.amax(dim=(-2, -1), keepdim=True) - 80.0)
        return self.head(self.net(level).squeeze(-1))


class MaskedSpeech(nn.Module):
    """Enhancement by a complex mask between stft and istft. (N, 400)."""

    def __init__(self, fft: int = 40) -> None:
        super().__init__()
        self.fft, bins = fft, fft // 2 + 1
        self.register_buffer("window", torch.hann_window(fft))
        self.rnn, self.mask = nn.GRU(bins, 16, batch_first=True), nn.Linear(16, 2 * bins)

    def forward(self, x: Tensor) -> Tensor:
        options = dict(n_fft=self.fft, hop_length=self.fft // 4, win_length=self.fft, window=self.window)
        spectrum = torch.stft(x, **options, return_complex=True)
        h, _ = self.rnn(torch.log1p(spectrum.abs()).transpose(1, 2))
        real, imag = torch.tanh(self.mask(h)).transpose(1, 2).chunk(2, dim=1)
        return torch.istft(spectrum * torch.complex(real, imag), **options, length=x.shape[-1])


class PhaseVocoder(nn.Module):
    """Vocos (Siuzdak 2023): frames to magnitude and phase, back by an inverse transform and overlapping windows. (N, 8, L)."""

    def __init__(self, bands: int = 8, fft: int = 16) -> None:
        super().__init__()
        self.fft, self.hop = fft, fft // 4
        self.net = nn.Sequential(nn.Conv1d(bands, 16, 3, padding=1), nn.GELU(), nn.Conv1d(16, fft + 2, 1))
        self.register_buffer("window", torch.hann_window(fft))

    def forward(self, x: Tensor) -> Tensor:
        mag, phase = self.net(x).chunk(2, dim=1)
        mag = torch.clip(torch.exp(mag), max=1e2)
        frames = torch.fft.irfft(mag * (torch.cos(phase) + 1j * torch.sin(phase)), self.fft, dim=1, norm="backward")
        frames = frames * self.window[None, :, None]
        length = (x.size(2) - 1) * self.hop + self.fft
        fold = lambda y: F.fold(y, (1, length), (1, self.fft), stride=(1, self.hop))[:, 0, 0]  # noqa: E731
        envelope = fold(self.window.square().expand(1, x.size(2), -1).transpose(1, 2))
        return fold(frames)[:, self.hop : -self.hop] / envelope[:, self.hop : -self.hop]


class ComplexLinear(nn.Module):
    """Layers with complex weights and the modReLU of Arjovsky et al. 2016. Real and imaginary parts: (N, 6, 2)."""

    def __init__(self, width: int = 6, out: int = 5) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(width, 8, dtype=torch.cfloat) / 3)
        self.w2 = nn.Parameter(torch.randn(8, out, dtype=torch.cfloat) / 3)
        self.b = nn.Parameter(torch.randn(8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.matmul(torch.view_as_complex(x), self.w1)
        size = torch.abs(z)
        z = F.relu(size + self.b) * (z / (size + 1e-5))
        z = z @ self.w2
        return torch.cat([z.abs(), torch.angle(z)], dim=-1)


class HolographicRecall(nn.Module):
    """Plate 1995: pairs are bound by circular convolution, summed, and one is asked for. Two of (N, 5, 16)."""

    def __init__(self, size: int = 16, classes: int = 7) -> None:
        super().__init__()
        self.key, self.value, self.head = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, classes)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        k, v = torch.fft.rfft(self.key(keys)), torch.fft.rfft(self.value(values))
        memory = (k * v).sum(1, keepdim=True)
        inverse = k.conj() / (k.abs().square() + 1e-3)
        return self.head(torch.fft.irfft(memory * inverse, n=keys.size(-1)))
