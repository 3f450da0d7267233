"""Text of a module with torch models, as the command line finds them by name."""

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4, bias=True):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, width, 3, bias=bias), nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(self.bn(self.conv(x)))

class NoWeights(nn.Module):
    def forward(self, x):
        return x.flatten(1) + 1

def deep():
    return deep()

def quits():
    raise SystemExit(3)
"""
