"""From a module and its samples to recorded calls, problems, a plan and its program: what `solve`
is made of, beside the search."""
