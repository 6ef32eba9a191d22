"""The pages: functions that fetch the data of one page each."""
