"""REPORT.md: sections, tables and figures from the CSVs in results/."""
