"""Rules of linear layers and of modules that only pass on or reshape. The converter fills the parameters."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from needle import ops

from .tables import functions, layers

layers("in_features out_features bias?", nn.Linear, layout="torch")
functions("input, weight, bias=None", {(F.linear,): ops.linear})
layers("start_dim end_dim", nn.Flatten, view="maybe")
layers("", nn.Identity, view="same", put=lambda base, value: value)
