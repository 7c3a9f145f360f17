"""The sweep over every model class of the installed transformers: eager attention against `"hf_paged"`."""
