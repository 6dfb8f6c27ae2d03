"""What everything else stands on: files, checks of what others wrote, processes, clocks and receipts."""
