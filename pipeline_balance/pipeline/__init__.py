"""A pipeline that trains while its layers move."""
