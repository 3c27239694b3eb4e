"""Grouped feed-forward network over home experts and replicas."""

from prophet.kernels.grouped_ffn.naive import ExpertWeights
from prophet.kernels.grouped_ffn.op import grouped_ffn

__all__ = ["ExpertWeights", "grouped_ffn"]
