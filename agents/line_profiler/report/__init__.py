"""The profile as text, as a page and as drawings."""
