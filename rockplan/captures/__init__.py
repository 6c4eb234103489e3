"""From a module and its samples to recorded calls, priced: what planning begins with."""
