"""`streamrl tune CONFIG`: the settings of a run that are fastest for their age, chosen by the calibrated simulator."""
