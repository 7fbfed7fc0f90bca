"""The documents: their code runs, their figures are those of the results, their links lead somewhere."""
