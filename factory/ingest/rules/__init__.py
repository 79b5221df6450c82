"""What ``policies/data.yaml`` may say, and the rules that drop, change or hold out documents."""
