"""Reports: claims, tables, figures and pages made from measurements. It knows no study."""
