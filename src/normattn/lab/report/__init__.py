"""Reports: claims, tables, figures and pages made from measurements; names no study."""
