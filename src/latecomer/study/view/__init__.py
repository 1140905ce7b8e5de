"""What people look at: the panels of a run or a comparison, drawn by a page or by matplotlib."""
