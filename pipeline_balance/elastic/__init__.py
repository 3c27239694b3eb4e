"""A running job changes its parallel layout in place: layouts of models, who takes which place, what a switch costs."""
