"""How long does a change of the parallel layout take, and how long does planning it?"""
