"""Code that tests share: functions that start processes, and that make models and files."""
