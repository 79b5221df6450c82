"""The base of all other packages of the factory: workspace, errors, policy files, devices; starting processes, showing progress, stopping."""
