"""The optimum of the performance model, for small cases."""
