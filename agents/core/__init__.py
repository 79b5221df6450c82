"""Code that all agents share: a proposal, the workbench that gives them evidence, untrusted text, YAML edits, HTML pages."""
