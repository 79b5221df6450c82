"""Commands of evaluation tasks."""
