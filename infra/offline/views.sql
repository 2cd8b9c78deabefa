-- Views of a lent machine's page, beside those of the warehouse; infra.offline.sections makes the tables.
--   figures    a row for each figure that is compared: its section and place, its title and limit, its packaged models
--   estimates  a row for each run, estimator and figure; error is relative, but absolute for ratios; model is the
--              packaged model that answered, NULL if the trace did, or for another training loop than the run's
--   modelled   the kernel model's time of an operator's kernels in a step of a run

CREATE TEMP MACRO size_text(size, figure) AS CASE WHEN figure IN ('smact', 'smocc', 'drama')
    THEN printf('%.3f', size) ELSE printf('%.1f%%', 100 * size) END;
CREATE TEMP MACRO bias_text(error, figure) AS if(median(error) < -0.0005, '-', '+')
    || size_text(abs(median(error)), any_value(figure));
CREATE TEMP MACRO p90_text(error, figure) AS size_text(quantile_disc(abs(error), 0.9), any_value(figure));
CREATE TEMP MACRO median_mib_text(mib) AS printf('%+.1f', round(median(mib), 1) + 0.0);  -- the sum has no -0.0

-- Single jobs that ended well.
CREATE TEMP VIEW solo AS FROM estimates JOIN figures USING (figure)
    WHERE status = 'ok' AND parallel IS NULL AND error IS NOT NULL;
CREATE TEMP VIEW traced AS FROM solo WHERE estimator = 'trace';

CREATE TEMP VIEW by_family AS
    SELECT section, any_value(title) AS figure, coalesce(family, 'all') AS family, count(*) AS runs,
        bias_text(error, solo.figure) AS "median error", p90_text(error, solo.figure) AS "90th percentile",
        family IS NOT NULL AND abs(median(error)) > any_value(off) AS is_off
    FROM traced AS solo GROUP BY GROUPING SETS ((section, place, solo.figure, family), (section, place, solo.figure))
    ORDER BY place, grouping(family), family;

CREATE TEMP VIEW causes AS
    SELECT family, tensors, reserved - tensors AS allocator, process - reserved AS context FROM (
        SELECT run_id, family, max(estimated - measured) FILTER (figure = 'allocated') AS tensors,
            max(estimated - measured) FILTER (figure = 'reserved') AS reserved,
            max(estimated - measured) FILTER (figure = 'process') AS process
        FROM traced GROUP BY ALL)
    WHERE tensors + reserved + process IS NOT NULL;
CREATE TEMP VIEW causes_by_family AS
    SELECT coalesce(family, 'all') AS family, count(*) AS runs, median_mib_text(tensors) AS tensors,
        median_mib_text(allocator) AS allocator, median_mib_text(context) AS context
    FROM causes GROUP BY GROUPING SETS ((family), ()) HAVING count(*) > 0 ORDER BY grouping(family), family;

CREATE TEMP VIEW bounds AS
    SELECT estimator AS estimate,
        printf('%d of %d', count(*) FILTER (measured <= upper_mib AND parallel IS NULL),
            count(*) FILTER (measured + upper_mib IS NOT NULL AND parallel IS NULL)) AS "runs below the 99 % bound",
        printf('%+.1f%%', 100 * median(upper_mib / measured - 1) FILTER (parallel IS NULL))
            AS "bound over need, median",
        printf('%d of %d', count(*) FILTER (status = 'oom' AND NOT fits), count(*) FILTER (status = 'oom'))
            AS "out-of-memory runs predicted"
    FROM estimates WHERE figure = 'process' GROUP BY estimator ORDER BY estimator DESC;

-- Packaged corrected models beside the trace, on runs that both answer.
CREATE TEMP VIEW corrected AS
    SELECT answer.target, any_value(answer.model) AS model, string_agg(DISTINCT family, ', ' ORDER BY family) AS families,
        count(*) AS runs, bias_text(trace.error, figure) || ' / ' || p90_text(trace.error, figure) AS trace,
        bias_text(answer.error, figure) || ' / ' || p90_text(answer.error, figure) AS "corrected model",
        median(abs(trace.error)) AS trace_error, median(abs(answer.error)) AS model_error
    FROM traced AS trace JOIN solo AS answer USING (run_id, figure, family) WHERE answer.model IS NOT NULL
    GROUP BY figure, answer.target ORDER BY answer.target;

-- Mean power by each sensor, compared with the energy counter that most runs have, over the windows of the runs.
CREATE TEMP VIEW sensors AS
    WITH readings AS (
        SELECT run_id, sensor, avg(power_w) AS power, (max(energy_j) - min(energy_j)) * 1e3 / nullif(
            max(t_ms) FILTER (energy_j IS NOT NULL) - min(t_ms) FILTER (energy_j IS NOT NULL), 0) AS counter
        FROM telemetry WHERE phase = 'window' AND coalesce(quality, 'measured') = 'measured' GROUP BY ALL),
    watts AS (
        SELECT run_id, sensor || ', power' AS source, power AS w FROM readings WHERE power <> 0 UNION ALL
        SELECT run_id, sensor || ', energy counter', counter FROM readings WHERE counter <> 0),
    reference AS (
        SELECT source FROM watts WHERE source LIKE '%energy counter' GROUP BY source
        ORDER BY count(*) DESC, contains(source, 'nvml') DESC, source LIMIT 1)
    SELECT sensor.source, count(*) AS runs, printf('%.3f', median(sensor.w / counter.w)) AS "ratio, median",
        printf('%.3f to %.3f', quantile_cont(sensor.w / counter.w, 0.1), quantile_cont(sensor.w / counter.w, 0.9))
            AS "10th to 90th percentile",
        counter.source AS "ratio to"
    FROM watts AS sensor JOIN watts AS counter USING (run_id)
    WHERE counter.source = (FROM reference) AND sensor.source <> counter.source
    GROUP BY ALL ORDER BY ALL;

-- Kernels of a step, summed over runs with measured and modelled kernels; a missing side is NULL.
CREATE TEMP VIEW operators AS
    WITH measured AS (
        SELECT timing, run_id, operator, sum(duration_us * count / steps) / 1e3 AS ms FROM kernels
        WHERE steps > 0 AND run_id IN (SELECT run_id FROM modelled) GROUP BY ALL),
    expected AS (FROM (SELECT DISTINCT timing, run_id FROM measured) JOIN modelled USING (run_id)),
    sums AS (
        SELECT timing, operator, count(measured.ms + expected.ms) AS runs, nullif(sum(measured.ms), 0) AS measured_ms,
            nullif(sum(expected.ms), 0) AS modelled_ms
        FROM measured FULL JOIN expected USING (timing, run_id, operator) GROUP BY ALL)
    SELECT *, modelled_ms / measured_ms AS ratio, measured_ms / sum(measured_ms) OVER (PARTITION BY timing) AS share,
        row_number() OVER (PARTITION BY timing ORDER BY greatest(measured_ms, modelled_ms) DESC, operator) AS rank
    FROM sums ORDER BY timing, rank;

CREATE TEMP VIEW layouts AS
    SELECT parallel AS layout, any_value(title) AS figure, count(*) AS runs,
        bias_text(error, estimates.figure) AS "median error", p90_text(error, estimates.figure) AS "90th percentile"
    FROM estimates JOIN figures USING (figure)
    WHERE parallel IS NOT NULL AND estimator = 'trace' AND error IS NOT NULL AND figure IN ('process', 'step_time')
    GROUP BY parallel, estimates.figure ORDER BY parallel, estimates.figure;
