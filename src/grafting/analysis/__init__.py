"""Analysis: collect -> tidy table -> statistics -> claims -> figures -> report. Never imports torch."""
