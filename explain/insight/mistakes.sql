SELECT label, prediction, label_class, prediction_class, count(*), avg(probability),
       (SELECT count(*) FROM photos a WHERE a.label_class = p.label_class),
       (SELECT count(*) FROM photos b WHERE b.label_class = p.prediction_class
                                        AND b.prediction_class = p.label_class)
FROM photos p WHERE label_class <> prediction_class
GROUP BY label_class, prediction_class ORDER BY count(*) DESC, avg(probability) DESC, label_class, prediction_class
LIMIT ?
