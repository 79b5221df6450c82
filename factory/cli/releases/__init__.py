"""Commands about releases beyond the model loop's: bundles and their verification."""
