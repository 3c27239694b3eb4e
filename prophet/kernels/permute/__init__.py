"""Token rows to send order, and experts' outputs back to tokens."""

from prophet.kernels.permute.op import permute, unpermute

__all__ = ["permute", "unpermute"]
