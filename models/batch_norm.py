"""Batch norm for padded batches."""

import torch
from torch import Tensor, nn


class BatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` whose statistics can leave out rows of padding."""

    def forward(self, x: Tensor, row_weights: Tensor | None = None) -> Tensor:
        """x [N, d] -> [N, d].

        Args:
            row_weights: [N], 1 / r for the first r rows and 0 for the others, which are padding; None: all rows are
                real. In training the statistics, also the running ones, are those of `nn.BatchNorm1d` on the first r.
        """
        if self.training and x.is_cuda and not torch.compiler.is_compiling():
            from models.dense.batch_norm import BatchNormFunction, runs_kernels  # on use: of training on a GPU alone

            if runs_kernels(x):
                return BatchNormFunction.apply(x, self.weight, self.bias, self, row_weights)
        if row_weights is None or not self.training:
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        weights = row_weights.to(wide.dtype)
        mean = weights @ wide
        centred = wide - mean
        variance = weights @ centred.square()
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            unbiased = variance / (1 - weights[0]).clamp(min=1e-9)  # n / (n - 1); of one row it is 0
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        scale = self.weight * (variance + self.eps).rsqrt()
        return torch.addcmul(self.bias, centred, scale).to(x.dtype)
