"""The base of all other packages: workspace, errors, policy files, devices; how processes are started, shown and stopped."""
