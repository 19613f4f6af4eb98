-- The tables of a run.

CREATE TABLE manifest (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL,              -- JSON
    digest INTEGER NOT NULL           -- of the other cells, as in all tables: see explain.store.writing
) WITHOUT ROWID;

CREATE TABLE methods (
    name TEXT PRIMARY KEY,
    class TEXT,                       -- in explain.methods; NULL for one of the caller's own
    options TEXT NOT NULL,            -- JSON, as in the record of an explanation
    style TEXT NOT NULL,              -- how its maps are drawn
    paper TEXT,
    digest INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE photos (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,        -- from the folder on, as in the list, or the number of the item
    path TEXT,                        -- NULL where there is no file
    stamp TEXT,                       -- size and times of the file: while they are the same, it need not be read again
    sha256 TEXT NOT NULL,             -- of the upright RGB pixels, or of the tensor
    width INTEGER NOT NULL,
    height INTEGER NOT NULL,
    label TEXT,                       -- the class that the source gives; of several, the one most probable to the model
    label_class INTEGER,              -- the class of the model; NULL where the label is none of the model's
    label_probability REAL,
    prediction TEXT,                  -- of the model; NULL where it gives no class scores
    prediction_class INTEGER,
    probability REAL,                 -- of the prediction
    "left" REAL NOT NULL, top REAL NOT NULL, "right" REAL NOT NULL, bottom REAL NOT NULL,  -- seen by the model
    input_height INTEGER NOT NULL,
    input_width INTEGER NOT NULL,
    boxes TEXT,                       -- JSON: [[x0, y0, x1, y1], ...] in pixels of the photo, ends exclusive, perhaps a label
    labels TEXT,                      -- JSON: [[class of the model or null, label], ...], all that are true; "uncertain" may follow
    probabilities TEXT,               -- JSON: {"labels": [...]} of all labels, or {"classes": [...]} where one class is true
    detections TEXT,                  -- JSON: [[label, score, x0, y0, x1, y1, class], ...], the best first
    digest INTEGER NOT NULL           -- of all cells but the id and the stamp
);

CREATE TABLE results (
    id INTEGER PRIMARY KEY,
    photo INTEGER NOT NULL REFERENCES photos (id) ON DELETE CASCADE,
    method TEXT NOT NULL REFERENCES methods (name),
    target TEXT NOT NULL,             -- the label, or the name of a target that is no class
    class INTEGER,                    -- NULL for a target that is no class
    score REAL NOT NULL,              -- the explained output
    probability REAL,                 -- of the class
    layer TEXT,                       -- JSON list where there are several
    delta REAL,                       -- the convergence delta of the method
    runs INTEGER,                     -- of methods that estimate: how many perturbed inputs
    error REAL,                       -- of methods that estimate: the largest error over the largest value
    metrics TEXT NOT NULL,            -- JSON: {metric: value}, null where it is not defined
    content INTEGER NOT NULL,         -- digest of the map
    digest INTEGER NOT NULL,          -- of the name of the photo, and of all cells but the map
    shape TEXT NOT NULL,              -- JSON: of the map
    scale REAL NOT NULL,              -- the numbers of the map are multiplied by it
    map BLOB NOT NULL                 -- float16, little-endian, row after row
);
CREATE UNIQUE INDEX once ON results (photo, method, ifnull(class, target));

CREATE TABLE failures (
    name TEXT PRIMARY KEY,
    path TEXT,
    reason TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE notes (
    note TEXT PRIMARY KEY             -- warnings, such as why a map is zero
) WITHOUT ROWID;

CREATE TABLE parts (                  -- of a run on several machines
    file TEXT PRIMARY KEY,            -- whose photos are here
    stamp TEXT                        -- changes when the file does
) WITHOUT ROWID;

CREATE VIEW explained AS  -- all but the maps
    SELECT r.id, p.name, p.path, p.sha256, p.label, p.label_class, p.label_probability, p.prediction,
           p.prediction_class, p.probability AS prediction_probability, p.prediction_class = p.label_class AS correct,
           r.method, r.target, r.class, r.score, r.probability, r.layer, r.delta, r.runs, r.error, r.shape, r.scale
    FROM results r JOIN photos p ON p.id = r.photo;

CREATE VIEW classes AS  -- accuracy for each class
    SELECT label, label_class, count(*) AS photos, sum(prediction_class = label_class) AS correct,
           avg(prediction_class = label_class) AS accuracy, avg(label_probability) AS label_probability
    FROM photos WHERE label_class IS NOT NULL GROUP BY label_class;

CREATE VIEW confusions AS  -- wrong predictions, the most frequent first
    SELECT label, prediction, count(*) AS photos
    FROM photos WHERE prediction_class <> label_class GROUP BY label_class, prediction_class ORDER BY photos DESC;

CREATE VIEW duplicates AS  -- the same pixels under several names
    SELECT sha256, count(*) AS photos, json_group_array(name) AS names
    FROM photos GROUP BY sha256, width, height HAVING count(*) > 1;

CREATE VIEW metrics AS  -- a row for each result and metric
    SELECT r.id AS result, m.key AS metric, m.value AS value FROM results r, json_each(r.metrics) m;

CREATE VIEW judged AS  -- the mean of each metric for each method
    SELECT r.method, m.key AS metric, avg(m.value) AS mean, count(m.value) AS photos
    FROM results r, json_each(r.metrics) m GROUP BY r.method, m.key;
