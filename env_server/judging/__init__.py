"""Is an answer right? Answers as text, tables compared, and the verdict."""
