-- The tables of a training, beside those of a run.

CREATE TABLE IF NOT EXISTS steps (
    photo INTEGER PRIMARY KEY REFERENCES photos (id) ON DELETE CASCADE,
    step INTEGER NOT NULL,            -- how many steps of training there were before
    name TEXT NOT NULL,               -- of the photo; in photos, the step stands before it
    UNIQUE (name, step)
);

CREATE TABLE IF NOT EXISTS figures (
    step INTEGER NOT NULL,
    name TEXT NOT NULL,               -- such as loss
    value REAL,                       -- NULL where it is not finite
    PRIMARY KEY (step, name)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS gradients (
    step INTEGER NOT NULL,
    parameter TEXT NOT NULL,
    rms REAL,                         -- mean of the root mean squares of the steps that were watched
    largest REAL,                     -- magnitude
    zero REAL NOT NULL,               -- mean share of elements that were zero
    verdict TEXT NOT NULL,            -- ok, vanishing, exploding, dead or not finite
    PRIMARY KEY (step, parameter)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS units (
    step INTEGER NOT NULL,
    layer TEXT NOT NULL,
    units INTEGER NOT NULL,
    dead INTEGER NOT NULL,            -- how many got no gradient in the steps that were watched
    numbers TEXT NOT NULL,            -- JSON: which
    PRIMARY KEY (step, layer)
) WITHOUT ROWID;
