"""Published policies to compare with, one file each."""
