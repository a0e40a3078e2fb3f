"""Plans without a cluster: command line, simulation, estimates, figures. No floor imports it."""
