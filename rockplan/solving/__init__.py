"""From a module and its samples to recorded graphs and search problems: what planning begins
with."""
