"""Validation: published training runs become predictions, and these errors by source.

A row of a CSV file says which model ran where, how it was parallelised, and how long a step took. It becomes
a job (`rows`, `models_of_rows`, `jobs_of_rows`), which is predicted as any other (`predictions`) and scored
(`scores`). What a row leaves out is assumed and counted; a row that cannot be predicted is skipped with a
reason.
"""
