"""moe-prophet: keeps expert-parallel Mixture-of-Experts training balanced."""

__version__ = "0.1.0.dev0"
