"""Handle the failure of a rank: the others report which rank failed and why, and exit within seconds."""
