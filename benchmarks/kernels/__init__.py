"""How fast are the MoE layer's kernels, next to the products they contain and to what others run instead?"""
