"""What every part stands on: the workspace, errors, policy files, devices, how processes are started, shown and stopped."""
