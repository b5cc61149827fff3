"""Requests between processes: their numbers, their answers, and those that are not answered yet."""
