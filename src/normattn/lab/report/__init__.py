"""Tables, claims, figures and pages made from a frame of measurements; names no study."""
