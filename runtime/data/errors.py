"""The error of the data stages: something in a user's files or arguments that no retry would mend."""


class DataError(ValueError):
    """One sentence that names the file (and line), says what is wrong with it, and what to do."""
