  // Members of further score terms (score_terms.cuh): none. A line `float slope;` here is p.slope in a term.
