// nanobind itself, whose sources come with its package; setup.py puts them on the include path.
#include <nb_combined.cpp>
