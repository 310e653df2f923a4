"""The report: one versioned value, and the formats that are made from it. No torch here."""
