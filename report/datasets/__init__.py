"""The paper's data set, decile and format tables."""
