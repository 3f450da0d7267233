"""Fronts and backs of audio networks: filter banks, wavelets, beamformers, phases, complex layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MelFrontEnd(nn.Module):
    """A log-mel front end with pre-emphasis, deltas and mean normalisation, before a small network. (N, L) waves."""

    def __init__(self, rate: int = 8000, size: int = 64, hop: int = 16, mels: int = 10) -> None:
        super().__init__()
        self.size, self.hop = size, hop
        self.register_buffer("window", torch.hamming_window(size, periodic=True))
        bins = size // 2 + 1
        frequencies = torch.linspace(0, rate // 2, bins)
        top = 2595.0 * math.log10(1.0 + rate / 2 / 700.0)
        points = 700.0 * (10.0 ** (torch.linspace(0, top, mels + 2) / 2595.0) - 1.0)
        gaps = points[1:] - points[:-1]
        slopes = points.unsqueeze(0) - frequencies.unsqueeze(1)
        bank = torch.clamp(torch.min(-slopes[:, :-2] / gaps[:-1], slopes[:, 2:] / gaps[1:]), min=0.0)
        self.register_buffer("bank", bank)
        self.conv = nn.Conv1d(2 * mels, 6, 3, padding=1)

    def forward(self, wave: Tensor) -> Tensor:
        wave = torch.cat([wave[:, :1], wave[:, 1:] - 0.97 * wave[:, :-1]], 1)
        spectrum = torch.stft(wave, self.size, self.hop, window=self.window, pad_mode="reflect", return_complex=True)
        power = spectrum.abs().pow(2.0)
        mel = 10.0 * torch.log10(torch.clamp((power.transpose(1, 2) @ self.bank).transpose(1, 2), min=1e-10))
        mel = torch.max(mel, mel.amax(dim=(-2, -1), keepdim=True) - 80.0)
        kernel = torch.arange(-2, 3, dtype=wave.dtype).repeat(mel.size(1), 1, 1) / 10
        delta = F.conv1d(F.pad(mel, (2, 2), mode="replicate"), kernel, groups=mel.size(1))
        x = torch.cat([mel, delta], 1)
        x = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)
        return self.conv(x)


class ConstantQ(nn.Module):
    """A constant-Q transform by kernels of windowed exponentials (nnAudio), magnitudes and phases. (N, L) waves."""

    def __init__(self, rate: int = 4000, lowest: float = 200.0, bins: int = 8, hop: int = 32) -> None:
        super().__init__()
        self.hop = hop
        q = 1 / (2 ** (1 / 4) - 1)
        frequencies = lowest * 2 ** (torch.arange(bins) / 4)
        lengths = torch.ceil(q * rate / frequencies)
        self.width = 2 ** math.ceil(math.log2(int(lengths.max())))
        kernels = torch.zeros(bins, self.width, dtype=torch.complex64)
        for k, (f, length) in enumerate(zip(frequencies.tolist(), lengths.int().tolist(), strict=True)):
            start = math.ceil(self.width / 2 - length / 2)
            t = torch.arange(length) - length // 2
            wave = torch.hann_window(length) * torch.exp(2j * math.pi * f / rate * t) / length
            kernels[k, start : start + length] = wave / torch.linalg.norm(wave, 1)
        self.register_buffer("kernels", kernels.unsqueeze(1))
        self.register_buffer("lengths", lengths)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.pad(x[:, None], (self.width // 2, self.width // 2), mode="reflect")
        y = F.conv1d(x.to(self.kernels.dtype), self.kernels, stride=self.hop)
        y = y * torch.sqrt(self.lengths.view(-1, 1))
        return y.abs(), torch.angle(y)


class SincNet(nn.Module):
    """Ravanelli and Bengio 2018: band-pass filters by their two frequencies, mirrored, with a Hamming window. (N, 1, L)."""

    def __init__(self, filters: int = 6, size: int = 17, rate: int = 8000) -> None:
        super().__init__()
        self.rate, self.size = rate, size
        hz = torch.linspace(30, rate / 2 - 100, filters + 1)
        self.low, self.band = nn.Parameter(hz[:-1].view(-1, 1)), nn.Parameter(torch.diff(hz).view(-1, 1))
        n = torch.linspace(0, size / 2 - 1, steps=int(size / 2))
        self.register_buffer("window", 0.54 - 0.46 * torch.cos(2 * math.pi * n / size))
        self.register_buffer("n", 2 * math.pi * torch.arange(-(size - 1) / 2.0, 0).view(1, -1) / rate)
        self.norm = nn.LayerNorm([filters, 16])

    def forward(self, wave: Tensor) -> Tensor:
        low = 30 + torch.abs(self.low)
        high = torch.clamp(low + 50 + torch.abs(self.band), 30, self.rate / 2)
        band = (high - low)[:, 0]
        left = (torch.sin(high @ self.n) - torch.sin(low @ self.n)) / (self.n / 2) * self.window
        centre, right = 2 * band.view(-1, 1), torch.flip(left, dims=[1])
        filters = torch.cat([left, centre, right], dim=1) / (2 * band[:, None])
        y = F.conv1d(wave, filters.view(-1, 1, self.size), padding=self.size // 2)
        return F.leaky_relu(self.norm(F.adaptive_max_pool1d(y.abs(), 16)))


class ComplexConv(nn.Module):
    """A convolution with complex weights and inputs."""

    def __init__(self, a: int, b: int, size: int, stride: int = 1, padding: int = 0, transposed: bool = False) -> None:
        super().__init__()
        shape = (a, b, size, size) if transposed else (b, a, size, size)
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.complex64) / (a * size * size) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(b, dtype=torch.complex64))
        self.call, self.stride, self.padding = (F.conv_transpose2d if transposed else F.conv2d), stride, padding

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.weight, self.bias, self.stride, self.padding)


class ComplexUNet(nn.Module):
    """Deep complex U-Net (Choi et al. 2019): complex convolutions, split ReLU, a bounded polar mask. (N, 2, 8, 8)."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first, self.down = ComplexConv(1, width, 3, 1, 1), ComplexConv(width, 2 * width, 3, 2, 1)
        self.up = ComplexConv(2 * width, width, 4, 2, 1, transposed=True)
        self.last = ComplexConv(2 * width, 1, 1)

    @staticmethod
    def relu(x: Tensor) -> Tensor:
        return torch.complex(F.relu(x.real), F.relu(x.imag))

    @staticmethod
    def norm(x: Tensor) -> Tensor:
        x = x - x.mean((0, 2, 3), keepdim=True)
        return x / torch.sqrt(x.abs().square().mean((0, 2, 3), keepdim=True) + 1e-5)

    def forward(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.complex(parts[:, :1], parts[:, 1:])
        a = self.relu(self.norm(self.first(x)))
        b = self.relu(self.norm(self.down(a)))
        c = torch.cat([self.relu(self.up(b)), a], 1)
        o = self.last(c)
        mask = torch.polar(torch.tanh(o.abs()), o.angle())
        y = mask * x
        return torch.view_as_real(y), y.abs()


class Beamformer(nn.Module):
    """MVDR with masks (Heymann et al. 2016): spatial covariances of speech and noise, a complex solve, a reference by weights.
    Spectra's parts (N, M, F, T, 2)."""

    def __init__(self, bins: int = 5, channels: int = 3) -> None:
        super().__init__()
        self.mask, self.reference = nn.Linear(bins, 2 * bins), nn.Parameter(torch.randn(channels))

    def forward(self, parts: Tensor) -> Tensor:
        x = torch.view_as_complex(parts)
        size = x.abs().mean(1).transpose(1, 2)
        speech, noise = torch.sigmoid(self.mask(torch.log1p(size))).transpose(1, 2).chunk(2, 1)

        def psd(mask: Tensor) -> Tensor:
            mask = mask / (mask.sum(-1, keepdim=True) + 1e-8)
            return torch.einsum("nft,nmft,nkft->nfmk", mask.to(x.dtype), x, x.conj())

        eye = torch.eye(x.size(1), dtype=x.dtype)
        top = torch.linalg.solve(psd(noise) + 1e-2 * eye, psd(speech))
        trace = top.diagonal(dim1=-2, dim2=-1).sum(-1)
        weight = (top / (trace[..., None, None] + 1e-8)) @ self.reference.softmax(0).to(x.dtype)
        return torch.view_as_real(torch.einsum("nfm,nmft->nft", weight.conj(), x))


class GriffinLim(nn.Module):
    """Fast Griffin-Lim (Perraudin et al. 2013) as a vocoder: phases by alternating transforms. Mels (N, 6, T)."""

    def __init__(self, mels: int = 6, size: int = 32, hop: int = 8, steps: int = 3) -> None:
        super().__init__()
        self.size, self.hop, self.steps = size, hop, steps
        self.inverse = nn.Parameter(torch.rand(size // 2 + 1, mels))
        self.register_buffer("window", torch.hann_window(size))

    def forward(self, mel: Tensor) -> Tensor:
        magnitude = F.relu(torch.matmul(self.inverse, mel.exp()))
        angles = torch.ones_like(magnitude) + 0j
        before = torch.zeros_like(angles)
        for _ in range(self.steps):
            wave = torch.istft(magnitude * angles, self.size, self.hop, self.size, self.window)
            rebuilt = torch.stft(wave, self.size, self.hop, self.size, self.window, return_complex=True)
            angles = rebuilt - before * (0.99 / 1.99)
            angles = angles / (angles.abs() + 1e-16)
            before = rebuilt
        return torch.istft(magnitude * angles, self.size, self.hop, self.size, self.window)


class ScatteringTransform(nn.Module):
    """Wavelet scattering (Mallat 2012) in one dimension: Morlet filters in frequency, modulus, low-pass, two orders. (N, 64)."""

    def __init__(self, length: int = 64, scales: int = 3) -> None:
        super().__init__()
        w = torch.fft.fftfreq(length) * 2 * math.pi
        centres = 0.75 * math.pi * 2.0 ** -torch.arange(scales)
        psi = torch.exp(-((w - centres[:, None]) ** 2) / (2 * (centres[:, None] / 4) ** 2))
        self.register_buffer("psi", psi)
        self.register_buffer("phi", torch.exp(-(w**2) / (2 * (math.pi / 2**scales / 2) ** 2)))
        self.stride = 2**scales

    def low(self, u: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(u) * self.phi).real[..., :: self.stride]

    def forward(self, x: Tensor) -> Tensor:
        first = torch.fft.ifft(torch.fft.fft(x).unsqueeze(1) * self.psi).abs()
        out = [self.low(x).unsqueeze(1), self.low(first)]
        for j in range(self.psi.size(0) - 1):
            second = torch.fft.ifft(torch.fft.fft(first[:, j : j + 1]) * self.psi[j + 1 :]).abs()
            out.append(self.low(second))
        return torch.log1p(torch.cat(out, 1))


class PitchTracker(nn.Module):
    """YIN's difference function by FFT (de Cheveigné and Kawahara 2002), the first dip under a threshold. (N, L) waves."""

    def __init__(self, size: int = 64, hop: int = 32, threshold: float = 0.4) -> None:
        super().__init__()
        self.size, self.hop, self.threshold = size, hop, threshold

    def forward(self, wave: Tensor) -> tuple[Tensor, Tensor]:
        frames = wave.unfold(-1, self.size, self.hop)
        half = self.size // 2
        energy = F.pad(frames.square().cumsum(-1), (1, 0))
        terms = energy[..., half : self.size] - energy[..., :half]
        a = torch.fft.rfft(frames, 2 * self.size)
        b = torch.fft.rfft(frames[..., :half], 2 * self.size)
        cross = torch.fft.irfft(a * b.conj(), 2 * self.size)[..., :half]
        difference = (terms[..., :1] + terms - 2 * cross)[..., 1:]
        lags = torch.arange(1, half, dtype=wave.dtype)
        normed = difference * lags / difference.cumsum(-1).clamp(min=1e-8)
        below = normed < self.threshold
        first = torch.where(below.any(-1), below.int().argmax(-1), normed.argmin(-1))
        return first + 1, normed.gather(-1, first.unsqueeze(-1)).squeeze(-1)


class LinearStateSpace(nn.Module):
    """S4 with HiPPO-LegS (Gu et al. 2022): bilinear discretisation by an inverse, a kernel of powers, convolved. (N, L, 3)."""

    def __init__(self, dim: int = 3, state: int = 4) -> None:
        super().__init__()
        p = torch.sqrt(1 + 2 * torch.arange(state).float())
        self.register_buffer("a", -(torch.tril(p[:, None] * p[None, :]) - torch.diag(torch.arange(state).float())))
        self.register_buffer("b", p[:, None])
        self.c, self.log_dt = nn.Parameter(torch.randn(dim, state)), nn.Parameter(torch.rand(dim) - 2)
        self.d = nn.Parameter(torch.randn(dim))

    def forward(self, u: Tensor) -> Tensor:
        length = u.size(1)
        dt = self.log_dt.exp()[:, None, None]
        eye = torch.eye(self.a.size(0), dtype=u.dtype)
        left = torch.linalg.inv(eye - dt / 2 * self.a)
        a, b = left @ (eye + dt / 2 * self.a), left @ (dt * self.b)
        powers = [b]
        for _ in range(length - 1):
            powers.append(a @ powers[-1])
        kernel = torch.einsum("cs,csl->cl", self.c, torch.cat(powers, -1))
        x = u.transpose(1, 2)
        y = torch.fft.irfft(torch.fft.rfft(x, n=2 * length) * torch.fft.rfft(kernel, n=2 * length), n=2 * length)
        return (y[..., :length] + x * self.d[:, None]).transpose(1, 2)
