"""The commands of evaluation tasks."""
