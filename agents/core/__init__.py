"""What all agents share: a proposal, the workbench that hands them evidence, and how to write what is not trusted."""
