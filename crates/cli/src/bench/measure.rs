//! Timing one benchmark: a first call, three to warm up, one whose moved bytes are counted, then at least seven until
//! the time is over. A call ends when the device is idle and its results are dropped. Results are looked at outside the
//! timed part, because a device tells of a failure only where a result is read.

use super::Workload;
use super::memory::Growth;
use kiln::{Device, Error, Tensor};
use kiln_cpu::Cpu;
use std::time::Instant;

const WARM_UP: usize = 3;
const LEAST: usize = 7;
const MOST: usize = 400;
/// The most memory that a first call takes anew.
const WANTED: usize = 256 << 20;

/// Times in milliseconds a call.
pub struct Times {
    pub median: f64,
    pub min: f64,
    pub first: f64,
    /// How many calls the median is of.
    pub calls: usize,
    /// The fewest bytes that a call can move: inputs read once and results written once.
    pub bytes: Option<usize>,
    /// The bytes that a call did move between kernels, by the engine's count; `None` where the device has no engine here.
    pub moved: Option<u64>,
    /// By how much the process grew over what it was before the first call, at its largest.
    pub grown: Option<usize>,
}

pub fn measure(device: &Device, work: &mut Workload, seconds: f64) -> Result<Times, Error> {
    touch(device)?;
    let growth = Growth::start();
    let start = Instant::now();
    let results = (work.call)();
    device.sync()?;
    let first = milliseconds(start);
    look(&results)?;
    let bytes = work.inputs.map(|inputs| inputs + results.iter().map(|t| t.meta().bytes()).sum::<usize>());
    drop(results);
    for _ in 0..WARM_UP {
        timed(device, work)?;
    }
    let before = moved(device);
    timed(device, work)?;
    let moved = moved(device).zip(before).map(|(after, before)| after - before);
    let (mut times, start) = (Vec::new(), Instant::now());
    while times.len() < LEAST || start.elapsed().as_secs_f64() < seconds && times.len() < MOST {
        times.push(timed(device, work)?);
    }
    let grown = growth.and_then(Growth::end);
    look(&(work.call)())?;
    times.sort_unstable_by(f64::total_cmp);
    Ok(Times { median: median(&times), min: times[0], first, calls: times.len(), bytes, moved, grown })
}

/// Has the device take and give back memory. A virtual machine gets its memory from its host when it first touches it,
/// at a dozen times the cost of having it (0.18 s for 64 MiB measured), which is no time of a first call.
fn touch(device: &Device) -> Result<(), Error> {
    // A device that does not have so much is as good as without.
    let _ = look(&[Tensor::arange(0, (WANTED / 8) as i64, 1, device)]);
    device.sync()?;
    device.cleanup();
    Ok(())
}

/// Bytes moved so far.
fn moved(device: &Device) -> Option<u64> {
    Some(device.driver().any()?.downcast_ref::<Cpu>()?.fusion().moved)
}

fn timed(device: &Device, work: &mut Workload) -> Result<f64, Error> {
    let start = Instant::now();
    let results = (work.call)();
    device.sync()?;
    drop(results);
    Ok(milliseconds(start))
}

fn milliseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// Reads an element of each result: a failure poisons all of a result.
fn look(results: &[Tensor]) -> Result<(), Error> {
    results.iter().filter(|t| t.numel() > 0).try_for_each(|t| {
        t.detach().reshape([-1]).narrow(0, 0, 1).to_data()?;
        Ok(())
    })
}

/// The middle of sorted times, or the mean of the two in the middle.
fn median(times: &[f64]) -> f64 {
    let (low, high) = (times[(times.len() - 1) / 2], times[times.len() / 2]);
    (low + high) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_and_bytes_are_those_of_inputs_and_results() {
        // Its own, for its counters.
        let device = Device::wrap("measured", std::sync::Arc::new(Cpu::start())).unwrap();
        let x = Tensor::randn([100], &device);
        let mut calls = 0;
        let mut work = Workload::moving([x.clone()], |[x]| vec![x + 1.0, x.sum(())]);
        let times = measure(&device, &mut work, 0.0).unwrap();
        assert_eq!((times.calls, times.bytes), (LEAST, Some(400 + 400 + 4)));
        assert_eq!(times.moved, Some(400 + 400 + 400 + 4), "two kernels read x");
        assert!(times.min <= times.median && times.min > 0.0);
        let mut work = Workload::new(move || {
            calls += 1;
            assert!(calls <= 1 + WARM_UP + 1 + MOST + 1);
            vec![&x + 1.0]
        });
        let times = measure(&device, &mut work, 60.0).unwrap();
        assert_eq!((times.calls, times.bytes), (MOST, None));
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[1.0]), 1.0);
        assert_eq!(median(&[1.0, 2.0, 9.0]), 2.0);
        assert_eq!(median(&[1.0, 2.0, 4.0, 9.0]), 3.0);
    }
}
