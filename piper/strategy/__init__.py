"""Strategy files and shorthand."""
