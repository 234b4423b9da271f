"""Records and pages of the studies that are not yet made of the frame."""
